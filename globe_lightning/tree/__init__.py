"""Pure geometry: trees over points and interaction plans between them."""

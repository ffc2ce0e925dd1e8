"""Pure torch: the GLOBE network."""

"""``python -m globe_lightning``: the same as the console script ``globe``."""

from globe_lightning.cli import main

if __name__ == "__main__":
    main()

"""``python -m persia`` is the command ``persia``."""

from persia.cli import main

if __name__ == "__main__":
    main()

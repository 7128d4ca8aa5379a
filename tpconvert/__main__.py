"""``python -m tpconvert`` is the command ``tpconvert``."""

from tpconvert.cli import main

if __name__ == "__main__":
    main()

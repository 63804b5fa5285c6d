"""``python -m statetap.engine``: see launcher.py."""

from .launcher import main

if __name__ == "__main__":
    main()

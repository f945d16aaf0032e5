"""`python -m diffcache`, for launchers that take a module."""

from diffcache.cli import main

if __name__ == "__main__":
    main()

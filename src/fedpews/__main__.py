"""`python -m fedpews` is the command `fedpews`."""

from fedpews.cli import main

if __name__ == "__main__":
    main()

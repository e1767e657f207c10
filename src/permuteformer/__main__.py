"""``python -m permuteformer`` is the command line."""

from permuteformer.cli import main

main()

"""What every package of persia uses: checks of arguments, options from files,
warnings. It imports no other package of persia.
"""

"""The small model that ships with Baton, and the script that made it: `python -m demo.train`."""

"""What is tested when: the suites, the paths that choose them, and the commands that run them.

Owns: the table of suites and paths (table.py), the choice (choice.py) and how phases run (__main__.py).
Must not import anything but the standard library: `.ci/run` asks before there is an environment.
"""

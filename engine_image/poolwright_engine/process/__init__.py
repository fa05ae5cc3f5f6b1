"""One engine process: its options, where its model comes from, how its parts are put together, how it lives and ends.

The one place that knows every part. Knows no verbs of the command line and no formats of requests.
"""

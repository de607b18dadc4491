"""A job that was cut short by an earlier version, with all its files; tests/batch/test_begun_before.py goes on with it.

    python -m tests.batch.half_done FOLDER     # writes such files anew, with the version that is checked out

f44c397 wrote those of `format_1`. Where a file's format changes, files of the version before it are kept beside these:
a folder each. Holds no tests.
"""

"""A model of jobs that are larger than this machine: discrete events, with
service times that are measured here.

``python -m benchmarks.model`` measures, checks the model against jobs of one
to four servers that really run, and then plays jobs of up to 1,000 servers and
1,536 ranks. ``events`` has the steps of a job, ``growth`` the numbers of
servers, ``measured`` what really runs.
"""

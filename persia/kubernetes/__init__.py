"""What a cluster needs beside the processes of a job: the gate.

api   questions to the API server
gate  the number of servers follows a ScaleGate: ``persia gate``
"""

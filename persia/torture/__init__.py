"""``persia torture``: a job of four roles whose processes are killed.

Each sample adds 1 to a row of its own, so the rows say how often each batch
was applied, and at which servers. A round is a job with its kills; all of it
follows from a seed.

  plan     what a seed decides
  data     the samples
  cluster  starts, kills and watches the processes
  roles    what the processes do
  verdict  what the rows say
  rounds   many rounds
"""

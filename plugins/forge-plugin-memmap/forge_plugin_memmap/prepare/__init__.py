"""`forge-run prepare-data`: from text, JSON lines and Parquet to shards of token ids.

One process reads the inputs in order and cuts them into chunks (`reading`, and a file for each format). Workers encode
chunks (`encoding`, `pool`). The first process puts the results, in order, into shards (`writing`), and notes how far it
is (`folder`), so that a run that was killed continues. The output depends on nothing but the arguments: chunks
only decide who does what, and when.
"""

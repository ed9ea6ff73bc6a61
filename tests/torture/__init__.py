"""What the promises of dropq are held against: crashes, faults, power cuts, strangers, real mounts; `make torture`.

Each part is a module with a function `run(options)`, which returns rows of the table that all of it ends in. Whether
the promises were kept is told by `account`, which looks at the disk and uses none of the code under test.
"""

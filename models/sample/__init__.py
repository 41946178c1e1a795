"""The sample models: synthetic pictures, the training that made the weights beside this file, and its loss.

Owns: everything needed to make the sample weights again. The service reads the files here and imports none of the code.
"""

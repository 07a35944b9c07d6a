import logging

# FAISS tells at INFO, which absl shows, every instruction set that it tries.
logging.getLogger('faiss.loader').setLevel(logging.WARNING)

import logging

# At INFO, which absl shows, FAISS logs every instruction set that it tries.
logging.getLogger('faiss.loader').setLevel(logging.WARNING)

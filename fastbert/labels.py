"""Names of labels in a batch, and the label that counts nowhere."""

IGNORED = -100  # of tokens and sequences without a label; PyTorch's ignore_index
PAIRS = ("next_sentence_label", "sentence_order_label")  # BERT's and ALBERT's labels of a pair of sentences
POSITIONS = ("start_positions", "end_positions")  # of an answer
NAMES = ("labels", *PAIRS, *POSITIONS)

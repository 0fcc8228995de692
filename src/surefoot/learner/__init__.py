"""The weights: loading them, scoring with them, changing them, saving them."""

import logging

for _name in ("torchao", "torch.utils._pytree"):
    # transformers imports torchao wherever it is installed; what it says of that concerns nobody.
    logging.getLogger(_name).setLevel(logging.ERROR)

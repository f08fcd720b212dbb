"""Plain torch modules, each readable in one sitting; the seed is the leading axis of every parameter.

Nothing here imports the theory: the two meet in the studies, or their agreement would be circular.
"""

from joma.models.block import ACTIVATIONS, ATTENTIONS, Block, BlockConfig
from joma.models.transformer import Decoder, DecoderConfig

__all__ = ["ACTIVATIONS", "ATTENTIONS", "Block", "BlockConfig", "Decoder", "DecoderConfig"]

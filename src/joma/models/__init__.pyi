from .block import ACTIVATIONS as ACTIVATIONS
from .block import ATTENTIONS as ATTENTIONS
from .block import Block as Block
from .block import BlockConfig as BlockConfig
from .clamped import ClampedEntropyDecoder as ClampedEntropyDecoder
from .config import DecoderConfig as DecoderConfig
from .steady import FrozenAttentionDecoder as FrozenAttentionDecoder
from .transformer import Decoder as Decoder

"""The decoder as plain modules, and its weights from and to Hugging Face folders."""

from longspan.model.decoder import Decoder, DecoderLayer
from longspan.model.init import InitialWeights, initial_tensor
from longspan.model.layers import Attend
from longspan.model.rotary import Rotary, rotary, rotate
from longspan.model.weights import HfWeights, full_tensors, load_hf, materialise, save_hf, whole

__all__ = [
    "Attend",
    "Decoder",
    "DecoderLayer",
    "HfWeights",
    "InitialWeights",
    "Rotary",
    "full_tensors",
    "initial_tensor",
    "load_hf",
    "materialise",
    "rotary",
    "rotate",
    "save_hf",
    "whole",
]

"""Strings to token ids and back: tokenizers, chat templates, incremental text.

Knows no engine, model or transport.
"""

from service.text.chat_template import ChatTemplate
from service.text.detokenizer import TextDelta, TextStream
from service.text.surrogates import replace_lone_surrogates
from service.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TextDelta", "TextStream", "Tokenizer", "replace_lone_surrogates"]

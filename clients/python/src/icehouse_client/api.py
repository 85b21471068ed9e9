"""API of the package, all that `icehouse_client` offers by its own name."""

from icehouse_client import formats, speculation
from icehouse_client.affinity import PREFIX_KEY_HEADER, prefix_key
from icehouse_client.aio import AsyncClient, AsyncStream
from icehouse_client.cache import CacheUse
from icehouse_client.cache_client import AsyncCacheClient, CacheClient, PinOptions, VerifyOptions, WarmOptions
from icehouse_client.chat import (
    Image,
    Infill,
    MalformedToolCall,
    Message,
    Tool,
    ToolCall,
    tool_result,
)
from icehouse_client.client import Client, Stream
from icehouse_client.conversation import Conversation
from icehouse_client.embeddings import Embeddings, EmbedOptions
from icehouse_client.errors import IcehouseClientError
from icehouse_client.logprobs import TokenLogprobs, TopLogprob
from icehouse_client.output_types import schema_of
from icehouse_client.requests import (
    DEFAULT_COMMAND_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Options,
    Prompt,
    PromptOptions,
)
from icehouse_client.reranking import Ranked, Ranking, RerankOptions
from icehouse_client.results import Completion, FinishReason, OutputError, Reply, Started, Token, Usage
from icehouse_client.security import Security
from icehouse_client.stream_sum import StreamEvent
from icehouse_client.tokens import TokenSource
from icehouse_client.tool_dicts import GivenTool, ToolChoice

__all__ = [
    "AsyncCacheClient",
    "AsyncClient",
    "AsyncStream",
    "CacheClient",
    "CacheUse",
    "Client",
    "Completion",
    "Conversation",
    "DEFAULT_COMMAND_TIMEOUT_S",
    "DEFAULT_TIMEOUT_S",
    "EmbedOptions",
    "Embeddings",
    "FinishReason",
    "GivenTool",
    "IcehouseClientError",
    "Image",
    "Infill",
    "MalformedToolCall",
    "Message",
    "Options",
    "OutputError",
    "PREFIX_KEY_HEADER",
    "PinOptions",
    "Prompt",
    "PromptOptions",
    "Ranked",
    "Ranking",
    "Reply",
    "RerankOptions",
    "Security",
    "Started",
    "Stream",
    "StreamEvent",
    "Token",
    "TokenLogprobs",
    "TokenSource",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "TopLogprob",
    "Usage",
    "VerifyOptions",
    "WarmOptions",
    "formats",
    "prefix_key",
    "schema_of",
    "speculation",
    "tool_result",
]

"""The endpoints of OpenAI's API, and those of vLLM's beside it."""

from __future__ import annotations

from router.faces.endpoint import Endpoint, Face
from router.faces.openai.chat_completions import chat_completions
from router.faces.openai.completions import completions
from router.faces.openai.embeddings import EmbeddingBody, embeddings
from router.faces.openai.model_routes import list_models, retrieve_model
from router.faces.openai.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.faces.openai.tokens import detokenize, tokenize

OPENAI_FACE = Face(
    endpoints=(
        Endpoint(
            "POST", "/v1/chat/completions", chat_completions,
            "An answer to a conversation, whole or as events, in the form of OpenAI's chat completions",
            track="chat.completions", body=ChatBody,
        ),
        Endpoint(
            "POST", "/v1/completions", completions,
            "Continuations of prompts, whole or as events, in the form of OpenAI's completions",
            track="completions", body=CompletionBody,
        ),
        Endpoint(
            "POST", "/v1/embeddings", embeddings, "Vectors of prompts, in the form of OpenAI's embeddings",
            track="embeddings", body=EmbeddingBody,
        ),
        Endpoint("GET", "/v1/models", list_models, "The models served, in the forms of OpenAI's and Anthropic's lists"),
        Endpoint("GET", "/v1/models/{name:path}", retrieve_model, "One model"),
        Endpoint("POST", "/tokenize", tokenize, "The tokens of a prompt or a conversation", body=TokenizeBody),
        Endpoint("POST", "/detokenize", detokenize, "The text of tokens", body=DetokenizeBody),
    )
)  # fmt: skip

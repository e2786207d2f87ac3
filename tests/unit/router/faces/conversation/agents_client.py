"""An agent of openai-agents with one tool, through the gateway at argv[1]; argv[2] is the API. Prints what it got.

It runs in an environment of its own (`make sdks`), whose openai is another one than ours, and imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import agents  # type: ignore[import-not-found]  # of the other environment
from openai import AsyncOpenAI


@agents.function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


async def main(url: str, api: str) -> None:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
    settings = agents.ModelSettings(include_usage=True)
    model = kinds[api](model="tiny", openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[weather], model_settings=settings)
    whole = await agents.Runner.run(agent, "What is the weather in Paris?")
    streamed = agents.Runner.run_streamed(agent, "What is the weather in Paris?")
    events = [event.type async for event in streamed.stream_events()]
    print(json.dumps({"whole": shown(whole), "streamed": shown(streamed), "events": sorted(set(events))}))


def shown(result: Any) -> dict[str, Any]:
    usage = result.context_wrapper.usage
    return {
        "text": result.final_output,
        "items": [type(item).__name__ for item in result.new_items],
        "usage": [usage.requests, usage.input_tokens, usage.output_tokens],
    }


asyncio.run(main(*sys.argv[1:]))

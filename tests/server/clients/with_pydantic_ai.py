"""pydantic-ai: tool loops over chat completions, Responses and Messages."""

import asyncio

from own_tools import TOOLS, URL, run_jobs
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


def run(model: object, request: str, streamed: bool) -> str:
    async def loop() -> str:
        agent = Agent(model, tools=list(TOOLS), instructions="Repair.")
        if not streamed:
            return (await agent.run(request)).output
        async with agent.run_stream_events(request) as events:
            *_, last = [event async for event in events]
        return last.result.output

    return asyncio.run(loop())


def chat(request: str, streamed: bool) -> str:
    return run(OpenAIChatModel("octavo", provider=OPENAI), request, streamed)


def responses(request: str, streamed: bool) -> str:
    return run(OpenAIResponsesModel("octavo", provider=OPENAI), request, streamed)


def messages(request: str, streamed: bool) -> str:
    provider = AnthropicProvider(base_url=URL, api_key="none")
    return run(AnthropicModel("octavo", provider=provider), request, streamed)


run_jobs(chat, responses, messages)

"""langgraph: agents over chat completions, Responses, Messages and Ollama's API."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from own_tools import TOOLS, URL, run_jobs

OPENAI = {"model": "octavo", "base_url": f"{URL}/v1", "api_key": "none"}


def run(model: object, request: str, streamed: bool) -> str:
    agent = create_agent(model, list(TOOLS), system_prompt="Repair.")
    question = {"messages": [("user", request)]}
    if not streamed:
        return agent.invoke(question)["messages"][-1].text
    modes = list(agent.stream(question, stream_mode=["messages", "values"]))
    assert any(mode == "messages" for mode, _ in modes)
    return modes[-1][1]["messages"][-1].text


def chat(request: str, streamed: bool) -> str:
    return run(ChatOpenAI(**OPENAI), request, streamed)


def responses(request: str, streamed: bool) -> str:
    return run(ChatOpenAI(**OPENAI, use_responses_api=True), request, streamed)


def messages(request: str, streamed: bool) -> str:
    return run(ChatAnthropic(model="octavo", base_url=URL, api_key="none"), request, streamed)


def ollama(request: str, streamed: bool) -> str:
    return run(ChatOllama(model="octavo", base_url=URL), request, streamed)


run_jobs(chat, responses, messages, ollama)

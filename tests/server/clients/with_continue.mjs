// Continue's client library: tool loops over chat completions and Messages.

import { FUNCTIONS, TOOLS, URL_, load, runJobs } from "./own_tools.mjs";

const { constructLlmApi } = await load("@continuedev/openai-adapters");
const tools = TOOLS.map((parameters) => ({ type: "function", function: parameters }));

function merged(chunks) {
  const message = { role: "assistant", content: "", tool_calls: [] };
  for (const { delta } of chunks.flatMap((chunk) => chunk.choices)) {
    message.content += delta.content ?? "";
    // Every call has the same index in what the library makes of Anthropic's events; ids tell them apart.
    for (const { id, function: part } of delta.tool_calls ?? []) {
      const known = message.tool_calls.at(-1);
      if (id && id !== known?.id) message.tool_calls.push({ id, type: "function", function: { ...part } });
      else known.function.arguments += part.arguments ?? "";
    }
  }
  return message;
}

const loop = (provider, apiBase) => async (prompt, streamed) => {
  const api = constructLlmApi({ provider, apiBase, apiKey: "none" });
  const messages = [{ role: "user", content: prompt }];
  const signal = new AbortController().signal;
  for (;;) {
    const body = { model: "octavo", messages, tools, max_tokens: 400 };
    let answer;
    // Of whole answers in Anthropic's form the library keeps one block, and no call: it streams them.
    if (streamed || provider === "anthropic") {
      const chunks = [];
      for await (const chunk of api.chatCompletionStream({ ...body, stream: true }, signal)) chunks.push(chunk);
      answer = merged(chunks);
    } else {
      answer = (await api.chatCompletionNonStream({ ...body, stream: false }, signal)).choices[0].message;
    }
    messages.push(answer);
    if (!answer.tool_calls?.length) return answer.content;
    for (const { id, function: called } of answer.tool_calls) {
      const content = FUNCTIONS[called.name](JSON.parse(called.arguments));
      messages.push({ role: "tool", tool_call_id: id, content });
    }
  }
};

await runJobs({
  chat: loop("openai", `${URL_}/v1/`),
  messages: loop("anthropic", `${URL_}/v1/`),
});

// Vercel's ai: tool loops over Responses, chat completions and Messages.

import { FUNCTIONS, TOOLS, URL_, load, runJobs } from "./own_tools.mjs";

const { generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const openai = (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${URL_}/v1`, apiKey: "none" });
const anthropic = (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${URL_}/v1`, apiKey: "none" });
const compatible = (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({
  name: "octavo",
  baseURL: `${URL_}/v1`,
});
const tools = Object.fromEntries(
  TOOLS.map(({ name, description, parameters }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: (input) => FUNCTIONS[name](input) }),
  ]),
);

const loop = (model, settings = {}) => async (prompt, streamed) => {
  const options = { model, tools, prompt, stopWhen: stepCountIs(9), maxRetries: 0, providerOptions: { openai: settings } };
  if (!streamed) return (await generateText(options)).text;
  const failed = [];
  const result = streamText({ ...options, onError: ({ error }) => failed.push(error) });
  for await (const part of result.fullStream) if (part.type === "error") failed.push(part.error);
  if (failed.length) throw failed[0];
  return await result.text;
};

await runJobs({
  // Without `store: false` the second step names what the server has said before by references.
  responses: loop(openai.responses("octavo")),
  stateless: loop(openai.responses("octavo"), { store: false, include: ["reasoning.encrypted_content"] }),
  chat: loop(openai.chat("octavo")),
  compatible: loop(compatible("octavo")),
  messages: loop(anthropic("octavo")),
});

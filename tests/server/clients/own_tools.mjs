// What every driver of a library of Node's shares: four tools, and a loop over the jobs, whole and streamed.

import { spawnSync } from "node:child_process";
import { readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const URL_ = process.argv[2];
const packages = createRequire(`${process.env.OCTAVO_NPM}/here.cjs`);

// Load a package of the environment, which does not lie beside this file.
export const load = async (name) => import(pathToFileURL(packages.resolve(name)));

export const FUNCTIONS = {
  read_it: ({ path }) => readFileSync(path, "utf8"),
  edit_it: ({ path, old, new: text }) => {
    const found = readFileSync(path, "utf8").split(old);
    if (found.length !== 2) throw new Error(old);
    writeFileSync(path, found.join(text));
    return "done";
  },
  write_it: ({ path, text }) => (writeFileSync(path, text), "done"),
  run_it: ({ command }) => {
    const done = spawnSync("sh", ["-c", command], { encoding: "utf8" });
    return `exit code ${done.status}\n${done.stdout}${done.stderr}`;
  },
};
const FIELDS = { read_it: ["path"], edit_it: ["path", "old", "new"], write_it: ["path", "text"], run_it: ["command"] };
export const TOOLS = Object.entries(FIELDS).map(([name, fields]) => ({
  name,
  description: `It is ${name}.`,
  parameters: {
    type: "object",
    properties: Object.fromEntries(fields.map((field) => [field, { type: "string" }])),
    required: fields,
    additionalProperties: false,
  },
}));

// Each agent, by its name, gets a request and whether to stream, and returns the last answer. It does all
// jobs, in files that are put back before the next agent.
export async function runJobs(agents) {
  const jobs = JSON.parse(readFileSync(`${process.argv[3]}/jobs.json`, "utf8"));
  const names = Object.keys(agents);
  const files = () => readdirSync(".").filter((name) => statSync(name).isFile());
  for (const name of names)
    for (const job of jobs) {
      process.chdir(job.folder);
      const before = files().map((path) => [path, readFileSync(path, "utf8")]);
      const answer = await agents[name](job.request, job.streamed);
      if (!answer.trim().endsWith(job.answer)) throw new Error(`${name} answers ${JSON.stringify(answer)}`);
      if (name === names.at(-1)) continue;
      files().forEach((path) => rmSync(path));
      before.forEach(([path, text]) => writeFileSync(path, text));
    }
  console.log(`${names.length * jobs.length} tasks, whole and streamed: ${names.join(", ")}`);
}

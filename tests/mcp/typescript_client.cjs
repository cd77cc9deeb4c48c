// The official TypeScript client: NODE_MODULES 1|2 ERA stdio COMMAND... | NODE_MODULES 1|2 ERA http URL TOKEN
// It works on a workspace and prints what it has seen as JSON.
const { createRequire } = require("node:module");
const path = require("node:path");

const [modules, major, era, kind, ...rest] = process.argv.slice(2);
const load = createRequire(path.join(modules, "x.js"));
const old = major === "1";
const { Client } = load(
  old ? "@modelcontextprotocol/sdk/client/index.js" : "@modelcontextprotocol/client",
);

function transport() {
  if (kind === "stdio") {
    const { StdioClientTransport } = load(
      old ? "@modelcontextprotocol/sdk/client/stdio.js" : "@modelcontextprotocol/client/stdio",
    );
    const [command, ...args] = rest;
    return new StdioClientTransport({ command, args, env: process.env, stderr: "ignore" });
  }
  const { StreamableHTTPClientTransport } = load(
    old ? "@modelcontextprotocol/sdk/client/streamableHttp.js" : "@modelcontextprotocol/client",
  );
  const headers = { Authorization: `Bearer ${rest[1]}` };
  return new StreamableHTTPClientTransport(new URL(rest[0]), { requestInit: { headers } });
}

async function main() {
  const questions = [];
  const options = { capabilities: { elicitation: { form: {} } } };
  if (!old) options.versionNegotiation = { mode: era === "new" ? "auto" : "legacy" };
  const client = new Client({ name: `typescript-${major}`, version: "1" }, options);
  const answer = async (request) => {
    questions.push(request.params.message);
    return { action: "accept", content: { answer: "yes" } };
  };
  if (old) {
    const { ElicitRequestSchema } = load("@modelcontextprotocol/sdk/types.js");
    client.setRequestHandler(ElicitRequestSchema, answer);
  } else {
    client.setRequestHandler("elicitation/create", answer);
  }
  await client.connect(transport());
  const call = (name, args = {}) => client.callTool({ name, arguments: args });
  const tools = (await client.listTools()).tools.map((each) => each.name);
  const written = await call("write_file", { path: "new.txt", content: "hello\n" });
  const failed = await call("read_file", { path: "missing.txt" });
  const resources = (await client.listResources()).resources.map((each) => each.uri);
  const read = await client.readResource({ uri: "wink://files/new.txt" });
  const diff = await client.readResource({ uri: "wink://diff" });
  const prompts = (await client.listPrompts()).prompts.map((each) => each.name);
  const prompt = await client.getPrompt({ name: prompts[0] });
  const completed = await client.complete({
    ref: { type: "ref/resource", uri: "wink://files/{+path}" },
    argument: { name: "path", value: "ne" },
  });
  const undone = await call("undo");
  await client.close();
  const seen = {
    tools,
    written: written.isError ?? false,
    failed: failed.isError,
    resources,
    read: read.contents[0].text,
    diff: diff.contents[0].text,
    prompt: prompt.messages[0].content.text.length > 0,
    completed: completed.completion.values,
    undone: undone.isError ?? false,
    questions,
  };
  process.stdout.write(JSON.stringify(seen));
}

main().then(() => process.exit(0), (error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});

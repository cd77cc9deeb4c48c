// Records every tool that pi uses as a call that `wink undo` undoes. Written by
// `wink hook install pi`, removed by `wink hook uninstall pi`.

import { spawn } from "node:child_process"

const COMMAND = ["wink hook run"]
const WINK = ["wink"]
const COMMANDS = {
  undo: "Undo a recorded tool call, such as 3",
  log: "Show the recorded tool calls, and what each changed",
  diff: "Show what a recorded call or run changed",
}

function record(event: object): Promise<any> {
  return new Promise((resolve, reject) => {
    const child = spawn(COMMAND[0], COMMAND.slice(1), { stdio: ["pipe", "pipe", "pipe"] })
    let said = ""
    let errors = ""
    child.stdout.on("data", (data) => (said += data))
    child.stderr.on("data", (data) => (errors += data))
    child.on("error", reject)
    child.stdin.on("error", () => {}) // it ended early: its exit code tells
    child.on("close", (code) => {
      if (code !== 0) return reject(new Error(errors || `wink ended with code ${code}`))
      resolve(said ? JSON.parse(said) : {})
    })
    child.stdin.end(JSON.stringify(event))
  })
}

export default function (pi: any) {
  let turn = 0

  const about = (name: string, ctx: any) => ({
    hook_event_name: name,
    session_id: ctx.sessionManager.getSessionId(),
    turn_id: `${turn}`,
    cwd: ctx.cwd,
    process_id: process.pid,
  })
  const tool = (event: any) => ({
    tool_name: event.toolName,
    tool_use_id: event.toolCallId,
    tool_input: event.input,
  })
  const after = async (event: any, ctx: any) => {
    try {
      const said = await record(event)
      if (said.message) ctx.ui.notify(said.message, "error")
      return said
    } catch (error: any) {
      ctx.ui.notify(`wink has not recorded ${event.hook_event_name}: ${error.message}`, "error")
      return {}
    }
  }

  pi.on("before_agent_start", async (event: any, ctx: any) => {
    turn += 1
    await after({ ...about("UserPromptSubmit", ctx), prompt: event.prompt }, ctx)
  })
  pi.on("tool_call", async (event: any, ctx: any) => {
    try {
      const said = await record({ ...about("PreToolUse", ctx), ...tool(event) })
      if (said.block) return { block: true, reason: said.block }
    } catch (error: any) {
      return { block: true, reason: `wink cannot record it: ${error.message}` }
    }
  })
  pi.on("tool_result", async (event: any, ctx: any) => {
    const text = event.content.map((part: any) => part.text ?? "").join("\n")
    const end = event.isError
      ? { ...about("PostToolUseFailure", ctx), error: text }
      : { ...about("PostToolUse", ctx), tool_response: text }
    const said = await after({ ...end, ...tool(event) }, ctx)
    if (said.rolled_back) return { content: [{ type: "text", text: said.rolled_back }], isError: true }
  })
  for (const [name, description] of Object.entries(COMMANDS)) {
    pi.registerCommand(`wink-${name}`, {
      description,
      handler: async (given: string, ctx: any) => {
        const words = [...WINK.slice(1), name, ...given.split(/\s+/).filter(Boolean)]
        const done = await pi.exec(WINK[0], words, { cwd: ctx.cwd })
        ctx.ui.notify(`${done.stdout}${done.stderr}`.trim(), done.code === 0 ? "info" : "error")
      },
    })
  }
  pi.on("agent_end", async (_: any, ctx: any) => {
    await after(about("Stop", ctx), ctx)
  })
}

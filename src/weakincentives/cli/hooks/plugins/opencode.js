// Records every tool that OpenCode uses as a call that `wink undo` undoes. Written by
// `wink hook install opencode`, removed by `wink hook uninstall opencode`.

import { spawn } from "node:child_process"

const COMMAND = ["wink hook run"]

function record(event) {
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

export const Wink = async ({ directory, client }) => {
  const parents = new Map() // of the sessions of sub-agents
  const turns = new Map()
  const begun = new Map() // the arguments of tools that have no end yet

  const about = (session) => {
    let root = session
    while (parents.has(root)) root = parents.get(root)
    return {
      session_id: root,
      agent_id: root === session ? "" : session,
      turn_id: turns.get(root) ?? "",
      cwd: directory,
      process_id: process.pid,
    }
  }
  const tell = async (message) => {
    await client.app.log({ body: { service: "wink", level: "error", message } }).catch(() => {})
    await client.tui.showToast({ body: { message, variant: "error" } }).catch(() => {})
  }
  const after = async (event) => {
    try {
      const said = await record(event)
      if (said.message) await tell(said.message)
      return said
    } catch (error) {
      await tell(`wink has not recorded ${event.tool_name ?? event.hook_event_name}: ${error.message}`)
      return {}
    }
  }

  return {
    "chat.message": async (input, output) => {
      if (!parents.has(input.sessionID)) turns.set(input.sessionID, output.message.id)
      const prompt = output.parts.map((part) => part.text ?? "").join(" ").replace(/^"(.*)"$/s, "$1")
      const own = about(input.sessionID)
      if (!own.agent_id) await after({ hook_event_name: "UserPromptSubmit", ...own, prompt })
    },
    "tool.execute.before": async (input, output) => {
      const own = { ...about(input.sessionID), tool_name: input.tool, tool_use_id: input.callID }
      const event = { hook_event_name: "PreToolUse", ...own, tool_input: output.args }
      const said = await record(event) // an error blocks the tool: it would not be recorded
      if (said.block) throw new Error(said.block)
      begun.set(input.callID, event)
    },
    "tool.execute.after": async (input, output) => {
      const event = begun.get(input.callID)
      begun.delete(input.callID)
      if (!event) return
      const said = await after({ ...event, hook_event_name: "PostToolUse", tool_response: output.output })
      if (said.rolled_back) output.output = said.rolled_back
    },
    event: async ({ event }) => {
      const { info, part, sessionID } = event.properties ?? {}
      if (event.type === "session.created" && info.parentID) parents.set(info.id, info.parentID)
      if (event.type === "message.part.updated" && part.type === "tool") {
        const before = begun.get(part.callID) // one that failed has no other end
        if (before && part.state.status === "error") {
          begun.delete(part.callID)
          await after({ ...before, hook_event_name: "PostToolUseFailure", error: part.state.error })
        }
      }
      if (event.type === "session.idle") {
        const own = about(sessionID)
        await after({ hook_event_name: own.agent_id ? "SubagentStop" : "Stop", ...own })
      }
    },
  }
}

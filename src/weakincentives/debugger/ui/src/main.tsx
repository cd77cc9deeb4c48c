import { render } from "preact";
import { App } from "./app.tsx";
import "./style.css";
import { start } from "./theme.ts";

start();
render(<App />, document.getElementById("app")!);

// Who is there, which view, and whether what is shown is live.

import { ask, whenLoggedOut } from "./api.js";
import { h, text } from "./dom.js";
import { jobView } from "./job.js";
import { overview } from "./overview.js";
import { notice } from "./parts.js";

const main = document.getElementById("main");
const lineLabel = document.getElementById("line");
const who = document.getElementById("who");
let leave = () => {};
let session = null;

function line(live) {
  text(lineLabel, live ? "● live" : "○ not connected; what is shown may be old");
  lineLabel.className = live ? "dim" : "warn";
}

function route() {
  leave();
  document.title = "Statetap";
  const [, kind, id] = location.hash.split("/");
  const mayWrite = session.scope !== "read";
  leave = kind === "jobs" && id ? jobView(main, line, decodeURIComponent(id), mayWrite) : overview(main, line);
  main.querySelector("h1")?.focus();
}

function login(message) {
  leave();
  leave = () => {};
  session = null;
  text(lineLabel, "");
  who.replaceChildren();
  const trouble = notice("failed");
  const key = h("input", { id: "key", type: "password", autocomplete: "current-password", required: true });
  const form = h(
    "form",
    {
      class: "login",
      onsubmit: async (event) => {
        event.preventDefault();
        try {
          await ask("v1/session", { method: "POST", body: { key: key.value } });
          await start();
        } catch (error) {
          trouble.fail(error);
          key.select();
        }
      },
    },
    h("h1", { tabindex: "-1" }, "Log in"),
    h("p", { class: "dim" }, message),
    h("label", { for: "key" }, "Key"),
    key,
    h("div", { class: "actions" }, h("button", {}, "Log in")),
    trouble.element,
    h("p", { class: "dim" }, "A key is made with ", h("code", {}, "statetap keys add NAME --scope read"), "."),
  );
  main.replaceChildren(form);
  key.focus();
}

async function start() {
  try {
    session = await ask("v1/session");
  } catch (error) {
    if (error.status === 401) {
      login("This coordinator asks for a key.");
      return;
    }
    const trouble = notice("failed");
    main.replaceChildren(trouble.element);
    trouble.fail(error);
    line(false);
    setTimeout(start, 3000);
    return;
  }
  const { version } = await ask("./");
  text(document.getElementById("version"), version);
  if (session.name) {
    const out = h("button", {
      onclick: async () => {
        await ask("v1/session", { method: "DELETE" });
        login("You are logged out.");
      },
    }, "Log out");
    who.replaceChildren(`${session.name} (${session.scope}) `, out);
  }
  route();
}

whenLoggedOut(() => {
  if (session !== null) login("The session has ended.");
});
window.addEventListener("hashchange", () => {
  if (session !== null) route();
});
start();

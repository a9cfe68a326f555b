// The Rust code of each lane.

import { copies, element } from "./dom.js";

const snippets = document.getElementById("snippets");

addEventListener("lanes", ({ detail }) => snippets.replaceChildren(...detail.map(show)));

function show(lane) {
  const button = element("button", { type: "button", textContent: "Copy", ariaLabel: `Copy the code of ${lane.policy}` });
  copies(button, () => lane.rust);
  return element("article", { className: "snippet card" },
    element("header", {}, element("h2", { textContent: lane.title }), button),
    element("pre", {}, element("code", { textContent: lane.rust })));
}

// Tabs, and the start of the page.

import * as setup from "./setup.js";
import "./compare.js";
import "./try.js";
import "./copy.js";

const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab, remember) {
  for (const other of tabs) {
    const selected = other === tab;
    other.setAttribute("aria-selected", String(selected));
    other.tabIndex = selected ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !selected;
  }
  if (remember) {
    const address = new URLSearchParams(location.search);
    const name = tab.id.replace("tab-", "");
    if (name === "compare") address.delete("tab");
    else address.set("tab", name);
    history.replaceState(null, "", "?" + address);
  }
  document.body.dataset.tab = tab.id.replace("tab-", "");
}

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab, true));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    next.focus();
    select(next, true);
  });
}

const named = document.getElementById("tab-" + new URLSearchParams(location.search).get("tab"));
select(tabs.includes(named) ? named : tabs[0], false);
setup.load();

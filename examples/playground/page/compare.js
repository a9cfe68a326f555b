// The lanes: asks the server to simulate the setup, and shows its pictures.

import { copies, element } from "./dom.js";
import * as setup from "./setup.js";

const lanes = document.getElementById("lanes");
const status = document.getElementById("status");
const timeline = document.getElementById("timeline");
const recommended = document.getElementById("recommended");
const share = document.getElementById("share");

/** The number of the last request. Responses to earlier ones are dropped. */
let asked = 0;
let width = 0;

/** Returns the width of a picture in pixels. */
function pictureWidth() {
  const columns = setup.get("mode") === "policy" ? 1 : innerWidth >= 1240 ? 3 : innerWidth >= 760 ? 2 : 1;
  const all = document.querySelector("main").clientWidth - (innerWidth <= 480 ? 24 : 40);
  return Math.floor((all - 16 * (columns - 1)) / columns) - 38;
}

async function simulate() {
  const number = ++asked;
  width = pictureWidth();
  const body = setup.query();
  body.set("width", width);
  if (body.get("hits") === "") body.delete("hits");
  lanes.setAttribute("aria-busy", "true");
  let response;
  try {
    response = await fetch("/simulate", { method: "POST", body });
  } catch {
    lanes.setAttribute("aria-busy", "false");
    status.textContent = "The server does not answer. Is it still running?";
    return;
  }
  if (response.status === 429) {
    const seconds = Number(response.headers.get("retry-after") ?? 1);
    status.textContent = `The playground limits itself. It continues in ${seconds} s.`;
    setTimeout(() => number === asked && simulate(), seconds * 1000);
    return;
  }
  const text = await response.text();
  if (number !== asked) return;
  lanes.setAttribute("aria-busy", "false");
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    answer = { field: "policy", error: text };
  }
  if (!response.ok) {
    setup.showError(answer.field, answer.error);
    status.textContent =
      lanes.firstChild ? "These are the lanes of the last valid setup." : "Correct the setup to see its lanes.";
    document.body.classList.add("stale");
    return;
  }
  setup.showError(null);
  document.body.classList.remove("stale");
  status.textContent = `${answer.hits} hits simulated in ${(answer.micros / 1000).toFixed(1)} ms`;
  lanes.classList.toggle("single", answer.lanes.length === 1);
  lanes.replaceChildren(...answer.lanes.map(show));
  recommend(answer.lanes);
  dispatchEvent(new CustomEvent("lanes", { detail: answer.lanes }));
}

/** Returns the chosen need if the strategy of a lane is recommended for it. */
function need(lane) {
  const chosen = document.querySelector("[name=need]:checked");
  return chosen && lane.strategy.startsWith(chosen.value) ? chosen : null;
}

function recommend(all) {
  const lane = all.find(need);
  recommended.hidden = !lane;
  if (!lane) return;
  const use = element("button", { type: "button", className: "quiet", textContent: "Show only this" });
  use.addEventListener("click", () => setup.set({ mode: "policy", policy: lane.policy }));
  use.hidden = all.length === 1;
  recommended.replaceChildren(element("p", {}, `You want ${need(lane).dataset.want}: use `,
    element("strong", { textContent: lane.title }), ", ", element("code", { textContent: lane.policy }),
    `. ${lane.idea}`), use);
}

function show(lane) {
  const counts = [["admitted", lane.admitted - lane.delayed, lane.delayed ? "admitted at once" : "admitted"],
    ["delayed", lane.delayed, "admitted late"], ["refused", lane.refused, "refused"]];
  const shown = counts.filter(([kind, count]) => kind !== "delayed" || count > 0);
  const heads = ["From", "Hits", "Admitted", "Late", "Refused"];
  const picture = new DOMParser().parseFromString(lane.svg, "image/svg+xml").documentElement;
  return element("article", { className: need(lane) ? "lane card recommended" : "lane card" },
    element("header", {},
      element("h2", { textContent: lane.title }),
      element("p", { className: "idea", textContent: lane.idea }),
      element("p", { className: "policy mono", textContent: lane.policy }),
      element("p", { className: "counts" }, ...shown.map(([kind, count, text]) =>
        element("span", { className: kind }, element("b", { textContent: count }),
          element("span", { textContent: ` ${text}` }))))),
    document.adoptNode(picture),
    element("details", {},
      element("summary", { textContent: "As text and table" }),
      element("p", { textContent: lane.summary }),
      element("table", {},
        element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col", textContent: head })))),
        element("tbody", {}, ...lane.rows.map((row) => element("tr", {},
          element("th", { scope: "row", textContent: row.from }),
          ...[row.hits, row.admitted, row.delayed, row.refused].map((count) => element("td", { textContent: count }))))))));
}

// The time line for hits by hand. Positions are in 1/10,000 of the simulated time.

let cursor = 0;

function clicks() {
  return setup.get("at").split(",").filter(Boolean).map(Number);
}

function drawTimeline() {
  const marks = clicks().map((at) => {
    const mark = document.createElement("i");
    mark.style.left = at / 100 + "%";
    return mark;
  });
  const line = document.createElement("b");
  line.style.left = cursor / 100 + "%";
  timeline.replaceChildren(...marks, line);
  timeline.setAttribute("aria-valuenow", String(Math.round(cursor / 100)));
  timeline.setAttribute("aria-valuetext", `${Math.round(cursor / 100)} % of the time, ${marks.length} hits`);
}

function add(at) {
  cursor = Math.max(0, Math.min(9999, Math.round(at)));
  setup.set({ at: [...clicks(), cursor].join(",") });
}

timeline.addEventListener("click", (event) => {
  const box = timeline.getBoundingClientRect();
  add((event.clientX - box.left) / box.width * 10000);
});
timeline.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 100, ArrowLeft: -100, PageUp: 1000, PageDown: -1000 }[event.key];
  if (step) cursor = Math.max(0, Math.min(9999, cursor + step));
  else if (event.key === "Home") cursor = 0;
  else if (event.key === "End") cursor = 9999;
  else if (event.key === "Enter" || event.key === " ") add(cursor);
  else if (event.key === "Backspace") undo();
  else return;
  event.preventDefault();
  drawTimeline();
});

function undo() {
  setup.set({ at: clicks().slice(0, -1).join(",") });
}
document.getElementById("undo").addEventListener("click", undo);
document.getElementById("clear").addEventListener("click", () => setup.set({ at: "" }));

copies(share, () => location.href);

setup.onChange(() => {
  const traffic = setup.get("traffic");
  document.getElementById("clicks").hidden = traffic !== "clicks";
  document.getElementById("hits").disabled = traffic === "clicks";
  document.getElementById("seed-field").hidden = traffic !== "poisson" && traffic !== "zipf";
  drawTimeline();
  simulate();
});

let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => Math.abs(pictureWidth() - width) > 4 && simulate(), 150);
});

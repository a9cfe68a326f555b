// Sends real requests to the limited route, and explains the responses.

import { element } from "./dom.js";

const choice = document.getElementById("trial");
const buttons = [...document.querySelectorAll("[data-send]")];
const responses = document.getElementById("responses");
const countdown = document.getElementById("countdown");
const said = document.getElementById("countdown-said");
const left = document.getElementById("left");
const bar = document.getElementById("countdown-bar");
const fields = document.getElementById("fields");
const last = document.getElementById("last");

const MEANINGS = {
  "x-ratelimit-limit": () => "The most units that can be spent at one instant.",
  "x-ratelimit-remaining": (value) => `${value} more ${value === "1" ? "unit" : "units"} can be spent now.`,
  "x-ratelimit-reset": (value) =>
    `More units remain at ${new Date(value * 1000).toLocaleTimeString()}, in seconds since 1970.`,
  "ratelimit-policy": () => "Each limit by name: q is its quota, w the seconds in which the quota returns.",
  "ratelimit": () => "Each limit by name: r units remain, and more in t seconds.",
  "retry-after": (value) => `Wait ${value} s, rounded up to whole seconds. The countdown has the exact time.`,
  "cache-control": () => "A refusal must not be cached.",
};

let sent = 0;

addEventListener("lanes", ({ detail }) => {
  const chosen = choice.value;
  // A limit on requests in flight is no policy, and the responses of the route end at once.
  const policies = detail.filter((lane) => lane.strategy !== "in-flight").map((lane) => lane.policy);
  choice.replaceChildren(...policies.map((policy) => element("option", { value: policy, textContent: policy })));
  if (policies.includes(chosen)) choice.value = chosen;
  for (const button of buttons) button.disabled = policies.length === 0;
});

async function send(count) {
  for (const button of buttons) button.disabled = true;
  const policy = choice.value;
  for (let i = 0; i < count; i++) {
    const started = performance.now();
    let response;
    try {
      response = await fetch("/try?" + new URLSearchParams({ policy }), { cache: "no-store" });
    } catch {
      last.textContent = "The server does not answer. Is it still running?";
      break;
    }
    const arrived = performance.now();
    const body = await response.json();
    show(response, body, arrived - started, arrived);
  }
  for (const button of buttons) button.disabled = false;
}

function show(response, body, took, arrived) {
  const refused = response.status === 429;
  const kind = refused ? "refused" : "admitted";
  const number = ++sent;
  const remaining = response.headers.get("x-ratelimit-remaining");
  const late = took > 150 ? `, after ${(took / 1000).toFixed(1)} s` : "";
  const note = refused ? "refused" : `admitted${late}, ${remaining} remaining`;
  responses.prepend(element("li", { className: kind },
    element("span", { className: "number", textContent: `#${number}` }),
    element("span", { className: "shape", textContent: refused ? "✕" : "●", ariaHidden: "true" }),
    element("strong", { textContent: response.status }),
    element("span", { textContent: note })));
  while (responses.children.length > 100) responses.lastChild.remove();

  const text = response.status === 429 ? "429 Too Many Requests" : `${response.status} ${response.statusText}`;
  last.replaceChildren(`Request #${number}: `, element("strong", { className: kind, textContent: text }));
  const rows = Object.entries(MEANINGS).filter(([name]) => response.headers.has(name)).map(([name, meaning]) => {
    const value = response.headers.get(name);
    return element("tr", {}, element("th", { scope: "row", textContent: name }),
      element("td", {}, element("code", { textContent: value }), element("span", { textContent: meaning(value) })));
  });
  fields.hidden = false;
  fields.tBodies[0].replaceChildren(...rows);

  if (refused) wait(body.retry_after_us, arrived);
  else stop();
}

let timer;

/** Counts down to the instant at which the next request is admitted. */
function wait(micros, arrived) {
  stop();
  countdown.hidden = false;
  if (micros === null) {
    said.textContent = "Refused. A request of this cost is never admitted.";
    return;
  }
  const end = arrived + micros / 1000;
  said.textContent = "Refused. The next request is admitted in";
  const tick = () => {
    const rest = end - performance.now();
    if (rest <= 0) {
      clearInterval(timer);
      countdown.classList.add("ready");
      said.textContent = "The wait is over. The next request is admitted.";
      return;
    }
    left.textContent = (Math.ceil(rest / 100) / 10).toFixed(1);
    bar.value = rest * 1000 / micros;
  };
  tick();
  timer = setInterval(tick, 50);
}

function stop() {
  clearInterval(timer);
  countdown.hidden = true;
  countdown.classList.remove("ready");
}

for (const button of buttons) button.addEventListener("click", () => send(Number(button.dataset.send)));
choice.addEventListener("change", stop);

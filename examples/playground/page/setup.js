// The setup: the form, and the query of the page's address. Both always agree, so a link shows the
// same picture.

const DEFAULTS = { mode: "all", policy: "10/minute", traffic: "mixed", hits: "", periods: "5", seed: "1", at: "",
  need: "" };

const form = document.getElementById("setup");
const state = { ...DEFAULTS };

/** Returns the setup as a query, without the defaults. */
export function query() {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== DEFAULTS[name] || name === "policy") query.set(name, value);
  }
  return query;
}

export function get(name) {
  return state[name];
}

/** Changes fields from code. */
export function set(values) {
  for (const [name, value] of Object.entries(values)) fill(name, value);
  changed();
}

function fill(name, value) {
  state[name] = value;
  const field = form.elements.namedItem(name);
  if (field) field.value = value;
}

const listeners = [];
export function onChange(listener) {
  listeners.push(listener);
}

function changed() {
  const tab = new URLSearchParams(location.search).get("tab");
  const address = query();
  if (tab) address.set("tab", tab);
  history.replaceState(null, "", "?" + address);
  for (const listener of listeners) listener();
}

/** Reads the address into the form. */
export function load() {
  const address = new URLSearchParams(location.search);
  for (const name of Object.keys(DEFAULTS)) {
    fill(name, address.get(name) ?? DEFAULTS[name]);
  }
  if (!form.elements.namedItem("traffic").value) form.elements.namedItem("traffic").value = state.traffic = "mixed";
  for (const listener of listeners) listener();
}

let timer;
form.addEventListener("input", (event) => {
  // The recommended strategy is one of all.
  if (event.target.name === "need") fill("mode", "all");
  for (const name of Object.keys(DEFAULTS)) {
    const field = form.elements.namedItem(name);
    if (field) state[name] = field.value.trim();
  }
  clearTimeout(timer);
  timer = setTimeout(changed, 120);
});
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("popstate", load);

/** Shows the errors of fields, and hides all others. */
export function showError(field, text) {
  for (const message of form.querySelectorAll(".error")) {
    const name = message.id.replace("-error", "");
    const shown = name === field || (name === "policy" && field && !document.getElementById(field + "-error"));
    message.hidden = !shown;
    message.textContent = shown ? text : "";
    document.getElementById(name).setAttribute("aria-invalid", String(shown));
  }
  document.getElementById("policy-hint").hidden = field === "policy";
}

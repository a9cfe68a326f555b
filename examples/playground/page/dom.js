// Helpers of the other files.

/** Creates an element with properties and children. */
export function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Copies a text when a button is pressed, and reports the result on the button. */
export function copies(button, text) {
  const name = button.textContent;
  button.addEventListener("click", async () => {
    // Browsers offer the clipboard only on secure and local pages.
    const copied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = name; }, 1500);
  });
}

// Elements are made once and changed in place, so that focus, selection and scroll position survive each update.

/** h("a", { href: "#/", class: "x", onclick: f }, "text", node) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function show(element, on) {
  element.hidden = !on;
}

/** Rows in the order of `items`; those that stay are changed in place. `make(item)` gives { element, update(item) }. */
export class Keyed {
  constructor(parent, key, make) {
    Object.assign(this, { parent, key, make });
    this.parts = new Map();
  }

  update(items) {
    const keys = new Set(items.map(this.key));
    for (const [key, part] of this.parts) {
      if (!keys.has(key)) {
        part.element.remove();
        this.parts.delete(key);
      }
    }
    let before = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      let part = this.parts.get(key);
      if (!part) {
        part = this.make(item);
        this.parts.set(key, part);
      }
      part.update(item);
      if (part.element === before) before = before.nextElementSibling;
      else this.parent.insertBefore(part.element, before);
    }
  }
}

/** `label` names it for those who do not see the heading above. */
export function table(label, columns) {
  const body = h("tbody");
  const head = h("tr", {}, ...columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)));
  return { element: h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, h("table", { "aria-label": label }, h("thead", {}, head), body)), body };
}

/** A question before what cannot be taken back: true when it is to be done. */
export function confirmed(question, yes) {
  let resolve;
  const promise = new Promise((done) => { resolve = done; });
  const dialog = h(
    "dialog",
    { "aria-label": yes, onclose: () => { resolve(dialog.returnValue === "yes"); dialog.remove(); } },
    h("p", {}, question),
    h(
      "div",
      { class: "actions" },
      h("button", { class: "danger", onclick: () => dialog.close("yes") }, yes),
      h("button", { autofocus: true, onclick: () => dialog.close("") }, "Leave it as it is"),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return promise;
}

/** A button that is off while what it does is under way; an error goes to `fail`. */
export function button(label, act, fail, attributes = {}) {
  const element = h("button", {
    ...attributes,
    onclick: async () => {
      element.disabled = true;
      try {
        await act();
      } catch (error) {
        fail(error);
      } finally {
        element.disabled = false;
      }
    },
  }, label);
  return element;
}

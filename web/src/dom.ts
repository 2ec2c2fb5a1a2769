// Making elements. Text only ever becomes text nodes: no string is parsed as HTML anywhere on this page.

export type Child = Node | string | number | null | undefined | false;
type Props = Record<string, unknown>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props?: Props | null, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  set(element, props);
  add(element, children);
  return element;
}

export function s<K extends keyof SVGElementTagNameMap>(tag: K, props?: Props | null, ...children: Child[]): SVGElementTagNameMap[K] {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(element, props);
  add(element, children);
  return element;
}

function set(element: Element, props?: Props | null): void {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else if (name === "class") element.setAttribute("class", String(value));
    else if (name === "value" || name === "checked") (element as unknown as Props)[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function add(element: Element, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  add(element, children);
}

/** A text that somebody else wrote: its direction cannot turn what stands around it. */
export function bdi(text: string): HTMLElement {
  return h("bdi", null, text);
}

/** A sentence that names commands: what stands between backticks looks like code. */
export function prose(text: string): HTMLElement {
  return h("bdi", null, ...text.split(/`([^`]+)`/).map((part, index) => (index % 2 ? h("code", null, part) : part)));
}

/** Words for the time in which there is nothing to show yet. */
export function loading(what: string): HTMLElement {
  return h("p", { class: "quiet", role: "status" }, `Reading ${what} …`);
}

export function empty(title: string, ...more: Child[]): HTMLElement {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), ...more.map((each) => h("p", null, each)));
}

export function failure(error: unknown): HTMLElement {
  const { message, why, hint } = error as { message?: string; why?: string; hint?: string };
  return h(
    "div",
    { class: "failure", role: "alert" },
    h("p", { class: "empty-title" }, message || "Something went wrong."),
    why ? h("p", null, h("b", null, "Why: "), bdi(why)) : null,
    hint ? h("p", null, h("b", null, "What to do: "), prose(hint)) : null,
  );
}

/** Calls `work` soon, never twice at once, and at most every `ms` (longer where the work takes long). */
export function gentle(work: () => Promise<void>, ms: number): () => void {
  let isBusy = false;
  let isWanted = false;
  const run = async (): Promise<void> => {
    if (isBusy) {
      isWanted = true;
      return;
    }
    isBusy = true;
    isWanted = false;
    const start = performance.now();
    try {
      await work();
    } finally {
      const took = performance.now() - start;
      window.setTimeout(() => {
        isBusy = false;
        if (isWanted) void run();
      }, Math.max(ms - took, took));
    }
  };
  return () => void run();
}

export function copyButton(text: string): HTMLElement {
  const button = h("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", () => {
    navigator.clipboard.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => (button.textContent = "Copying was refused"),
    );
    window.setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

/** The look of what is loaded later. */

const known = new Set<string>();

/** Give the page this look, once. */
export function addStyle(css: string): void {
  if (known.has(css)) return;
  known.add(css);
  const style = document.createElement("style");
  style.textContent = css;
  document.head.append(style);
}

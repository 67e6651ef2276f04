/**
 * A button in the place of a form's control, until a pointer or the focus comes to it.
 *
 * Whenever such a control is added anywhere, a browser's autofill looks at all of them, and has cells styled that nobody
 * sees. With two in each cell, a notebook of 200 cells took a third longer to open.
 */

import { make } from "../words";

export class StandIn {
  readonly button: HTMLButtonElement;
  private control: HTMLElement | null = null;

  /**
   * @param name - The class of both, which have the same look.
   * @param makeControl - Makes the control, once.
   * @param mayGo - Whether the button may take its place again when pointer and focus have gone.
   */
  constructor(
    name: string,
    private readonly makeControl: () => HTMLElement,
    private readonly mayGo: () => boolean = () => true,
  ) {
    this.button = make("button", name);
    this.button.type = "button";
    this.button.addEventListener("pointerenter", () => {
      this.show();
    });
    this.button.addEventListener("focus", () => {
      this.show().focus();
    });
  }

  private show(): HTMLElement {
    this.control ??= this.made();
    this.button.replaceWith(this.control);
    return this.control;
  }

  private made(): HTMLElement {
    const control = this.makeControl();
    const leave = (): void => {
      const dialog = document.querySelector(".jp-Dialog"); // brings the focus back
      if (this.mayGo() && dialog === null && !control.matches(":hover, :focus")) control.replaceWith(this.button);
    };
    control.addEventListener("blur", leave);
    control.addEventListener("pointerleave", leave);
    return control;
  }
}

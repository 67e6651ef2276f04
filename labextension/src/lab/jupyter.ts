/**
 * What of JupyterLab is used here: types, and how its modules are reached.
 *
 * JupyterLab and its extensions share their modules in a "scope": name, version, and what loads them. These interfaces
 * hold the few members that we use, so no package of JupyterLab is needed to build; the tests run in a real one.
 */

import type { LineKernel } from "../kernel_line";

export interface Signal<Sender, Arguments> {
  connect(slot: (sender: Sender, value: Arguments) => void): boolean;
  disconnect(slot: (sender: Sender, value: Arguments) => void): boolean;
}

export interface Widget {
  readonly id: string;
  readonly node: HTMLElement;
  readonly isDisposed: boolean;
  readonly isVisible: boolean;
  readonly disposed: Signal<unknown, unknown>;
}

/** A widget of ours, made by `Modules.widget`. */
export interface OwnWidget extends Widget {
  id: string;
  readonly title: { icon: unknown; caption: string; label: string };
  addClass(name: string): void;
  onAfterShow?(): void;
  onAfterHide?(): void;
}

export interface Kernel extends LineKernel {
  readonly id: string;
  readonly connectionStatus: string;
  readonly status: string;
  /** Begin to connect anew; rejects when that is given up. */
  reconnect(): Promise<void>;
}

export interface SessionContext {
  readonly isReady: boolean;
  readonly session: { readonly kernel: Kernel | null } | null;
  readonly kernelChanged: Signal<unknown, unknown>;
  readonly connectionStatusChanged: Signal<unknown, unknown>;
  readonly statusChanged: Signal<unknown, string>;
}

export interface SharedCell {
  /** What the kernel is told with each run. */
  getId(): string;
  getSource(): string;
  setSource(source: string): void;
  /** Replace a part of the source. */
  updateSource(start: number, end: number, value: string): void;
  getMetadata(key: string): unknown;
  readonly changed: Signal<unknown, unknown>;
}

/** What has happened to a text; "set": it is another one. */
export interface TextChange {
  readonly type: "insert" | "remove" | "set";
  readonly start: number;
  readonly value: string;
}

/** The text of a stream, which grows. */
export interface StreamText {
  readonly text: string;
  readonly changed: Signal<unknown, TextChange>;
  insert(index: number, text: string): void;
}

/** One output. `data` is as it began; the text of a stream grows apart from it. */
export interface OutputModel {
  readonly data: Record<string, unknown>;
  readonly streamText?: StreamText;
}

/** What shows an output. */
export interface Renderer extends Widget {
  renderModel(model: OutputModel): Promise<void>;
}

export interface RendererFactory {
  readonly safe: boolean;
  readonly mimeTypes: readonly string[];
  createRenderer(options: unknown): Renderer;
}

/** What a cell has put out. */
export interface Outputs {
  readonly length: number;
  get(index: number): OutputModel;
  add(output: object): number;
  readonly changed: Signal<unknown, unknown>;
}

export interface CellModel {
  readonly type: string;
  /** Of code cells. */
  readonly outputs?: Outputs;
  /** The same; null before the first run. */
  readonly executionCount?: number | null;
  readonly executionState?: string;
  readonly sharedModel: SharedCell;
}

interface Position {
  readonly line: number;
  readonly column: number;
}

export interface Editor {
  getCursorPosition(): Position;
  setCursorPosition(position: Position): void;
  getOffsetAt(position: Position): number;
  getPositionAt(offset: number): Position | undefined;
}

export interface Cell extends Widget {
  readonly model: CellModel;
  /** Null as long as the cell is far from what is seen. */
  readonly editor: Editor | null;
  readonly ready: Promise<void>;
  readonly inputArea: Widget | null;
}

export interface Notebook extends Widget {
  readonly widgets: readonly Cell[];
  readonly activeCell: Cell | null;
  activeCellIndex: number;
  readonly activeCellChanged: Signal<unknown, Cell | null>;
  readonly model: { readonly cells: { readonly changed: Signal<unknown, unknown> }; readonly readOnly: boolean } | null;
  readonly modelContentChanged: Signal<unknown, unknown>;
  /** Of this notebook alone. */
  readonly rendermime: {
    getFactory(type: string): RendererFactory | undefined;
    addFactory(factory: RendererFactory, rank: number): void;
  };
}

export interface NotebookPanel extends Widget {
  readonly content: Notebook;
  readonly sessionContext: SessionContext;
  readonly context: {
    readonly path: string;
    readonly ready: Promise<void>;
    readonly model: { readonly readOnly: boolean };
    /** What the server has told of the file; null before that. */
    readonly contentsModel: { readonly writable: boolean } | null;
  };
  readonly toolbar: { insertAfter(at: string, name: string, widget: Widget): boolean; addItem(name: string, widget: Widget): boolean };
}

export interface NotebookTracker {
  readonly currentWidget: NotebookPanel | null;
  readonly currentChanged: Signal<unknown, NotebookPanel | null>;
  readonly widgetAdded: Signal<unknown, NotebookPanel>;
  forEach(visit: (panel: NotebookPanel) => void): void;
}

export interface Commands {
  addCommand(id: string, options: { label: string; caption?: string; execute: () => unknown; isEnabled?: () => boolean }): unknown;
  /** Have whoever shows the command ask again whether it is enabled. */
  notifyCommandChanged(id: string): void;
}

export interface App {
  readonly commands: Commands;
  readonly shell: {
    add(widget: Widget, area: string, options?: { rank: number }): void;
    activateById(id: string): void;
  };
}

export interface StatusBar {
  registerStatusItem(id: string, item: { item: Widget; align: "left"; rank: number }): unknown;
}

export interface CommandPalette {
  addItem(item: { command: string; category: string }): unknown;
}

export interface Plugin {
  id: string;
  description: string;
  autoStart: true;
  requires: unknown[];
  optional: unknown[];
  activate: (app: App, ...services: never[]) => void;
}

interface NotebookModule {
  INotebookTracker: unknown;
  NotebookActions: {
    insertBelow(notebook: Notebook): void;
    insertAbove(notebook: Notebook): void;
    run(notebook: Notebook, context: SessionContext): Promise<boolean>;
  };
}

interface AppUtilsModule {
  ICommandPalette: unknown;
  /** Works in pages that came over plain http, too, which have no `navigator.clipboard`. */
  Clipboard: { copyToSystem(text: string): void };
  InputDialog: {
    getText(options: { title: string; label: string; text: string }): Promise<{ value: string | null }>;
  };
  showDialog(options: { title: string; body: string; buttons: unknown[] }): Promise<{ button: { accept: boolean } }>;
  Dialog: { cancelButton(): unknown; okButton(): unknown; warnButton(options: { label: string }): unknown };
}

interface WidgetsModule {
  Widget: new (options: { node: HTMLElement }) => OwnWidget;
}

interface UiModule {
  LabIcon: new (options: { name: string; svgstr: string }) => unknown;
}

interface ServerSettings {
  readonly baseUrl: string;
}

interface ServicesModule {
  ServerConnection: {
    makeSettings(): ServerSettings;
    makeRequest(url: string, init: RequestInit, settings: ServerSettings): Promise<Response>;
  };
  KernelMessage: {
    createMessage(options: { msgType: string; channel: string; username: string; session: string; content: object }): unknown;
  };
}

/** Modules that this page shares with JupyterLab. */
export interface Modules {
  notebook: NotebookModule;
  apputils: AppUtilsModule;
  widgets: WidgetsModule;
  ui: UiModule;
  services: ServicesModule;
  /** Its status bar; null in Jupyter Notebook, which has none. */
  IStatusBar: unknown;
}

type Factory = () => unknown;
type Version = { get: () => Factory | Promise<Factory>; loaded?: unknown };

/** What module federation hands over: packages, their versions, and how each is loaded. */
export type Scope = Record<string, Record<string, Version>>;

/** Load what all plugins need. */
export async function modules(scope: Scope): Promise<Modules> {
  const [notebook, apputils, widgets, ui, services, statusbar] = await Promise.all([
    load(scope, "@jupyterlab/notebook"),
    load(scope, "@jupyterlab/apputils"),
    load(scope, "@lumino/widgets"),
    load(scope, "@jupyterlab/ui-components"),
    load(scope, "@jupyterlab/services"),
    load(scope, "@jupyterlab/statusbar"),
  ]);
  return {
    notebook: notebook as NotebookModule,
    apputils: apputils as AppUtilsModule,
    widgets: widgets as WidgetsModule,
    ui: ui as UiModule,
    services: services as ServicesModule,
    IStatusBar: (statusbar as { IStatusBar: unknown } | null)?.IStatusBar ?? null,
  };
}

/** Load a module as federation does a singleton: the version in use, else the newest. Null: the page has none. */
export async function load(scope: Scope, name: string): Promise<unknown> {
  const versions = Object.entries(scope[name] ?? {});
  const [, found] = versions.find(([, each]) => each.loaded) ?? versions.sort(([one], [other]) => compare(other, one))[0] ?? [];
  return found === undefined ? null : (await found.get())();
}

function compare(one: string, other: string): number {
  return one.localeCompare(other, "en", { numeric: true });
}

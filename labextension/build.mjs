/**
 * Builds what pages load: the panel's widget, and JupyterLab's extension in the folder from which the wheel takes it.
 *
 * node build.mjs [ROOT]    below ROOT (default: the repository): nbdist/panel/static, labextension/prebuilt
 *
 * JupyterLab asks an extension for a script that leaves an object with `init` and `get`: a container of module federation.
 * `container` below is one by hand. Everything else is ordinary modules, which the page loads when something needs them.
 */

import { cpSync, readFileSync, rmSync, mkdirSync, writeFileSync } from "node:fs";
import { createHash } from "node:crypto";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build, transform } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const root = process.argv[2] ?? join(here, "..");
const target = ["es2022", "chrome123"];
const shared = { "@jupyterlab/application": "^4.3.0", "@jupyterlab/notebook": "^4.3.0" }; // `jupyter labextension list` compares

/** CSS as text, for a module that is loaded when its look is needed. */
const styles = {
  name: "styles",
  setup: ({ onLoad }) => {
    onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(readFileSync(path, "utf8"), { loader: "css", minify: true, target });
      return { contents: code, loader: "text" };
    });
  },
};

async function buildWidget() {
  await build({
    absWorkingDir: here,
    entryPoints: { widget: "src/widget.ts" },
    bundle: true,
    minify: true,
    format: "esm",
    target,
    outdir: join(root, "nbdist/panel/static"),
    logLevel: "warning",
  });
  await build({
    absWorkingDir: here,
    entryPoints: { widget: "style/panel.css" },
    minify: true,
    target,
    outdir: join(root, "nbdist/panel/static"),
    logLevel: "warning",
  });
}

async function buildExtension() {
  const folder = join(root, "labextension/prebuilt/nbdist");
  rmSync(folder, { force: true, recursive: true });
  const { metafile } = await build({
    absWorkingDir: here,
    entryPoints: { extension: "src/lab/extension.ts" },
    entryNames: "[name].[hash]",
    chunkNames: "[name].[hash]",
    bundle: true,
    splitting: true,
    minify: true,
    format: "esm",
    target,
    plugins: [styles],
    metafile: true,
    outdir: join(folder, "static"),
    logLevel: "warning",
  });
  const [entry] = Object.entries(metafile.outputs).filter(([, output]) => output.entryPoint === "src/lab/extension.ts");
  const script = container(entry[0].split("/").at(-1));
  const name = `remoteEntry.${createHash("sha256").update(script).digest("hex").slice(0, 8)}.js`;
  writeFileSync(join(folder, "static", name), script);
  cpSync(join(here, "schema"), join(folder, "schemas/nbdist"), { recursive: true }); // where Jupyter's server looks for them
  writePackage(folder, `static/${name}`);
}

/** A page runs this at once, so it is small: the rest comes when JupyterLab asks for the plugins. */
function container(entry) {
  return `(() => {
  const base = document.currentScript.src;
  let scope;
  (window._JUPYTERLAB ??= {}).nbdist = {
    init: (shared) => void (scope = shared),
    get: async (name) => (await import(new URL(${JSON.stringify(entry)}, base).href)).load(name, scope),
  };
})();
`;
}

function writePackage(folder, load) {
  const version = /__version__ = "(.+)"/.exec(readFileSync(join(here, "../nbdist/_version.py"), "utf8"))[1];
  const { description, license } = JSON.parse(readFileSync(join(here, "package.json"), "utf8"));
  const built = { load, extension: "./extension" };
  const facts = { name: "nbdist", version, description, license, dependencies: shared, jupyterlab: { _build: built } };
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "package.json"), `${JSON.stringify(facts, null, 2)}\n`);
  const origin = { packageManager: "python", packageName: "nbdist", uninstallInstructions: "pip uninstall nbdist" };
  writeFileSync(join(folder, "install.json"), `${JSON.stringify(origin, null, 2)}\n`);
}

await buildWidget();
await buildExtension();

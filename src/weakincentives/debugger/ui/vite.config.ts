import { existsSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** Writes LICENSES.txt: the licence of every package that is in the bundle. */
function licences(): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const packages = new Set<string>();
      for (const id of this.getModuleIds()) {
        const found = /\/node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(id);
        if (found?.[1]) packages.add(found[1]);
      }
      const texts = [...packages].sort().map((name) => {
        const root = new URL(`./node_modules/${name}/`, import.meta.url);
        const { version, license } = JSON.parse(readFileSync(new URL("package.json", root), "utf8"));
        const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"].find((f) => existsSync(new URL(f, root)));
        if (!file) throw new Error(`${name} has no licence file`);
        const text = readFileSync(new URL(file, root), "utf8").replace(/\r\n/g, "\n").trim();
        return `${name} ${version} (${license})\n\n${text}\n`;
      });
      const rule = `\n${"-".repeat(72)}\n\n`;
      const head = "app.js contains these packages.\n";
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source: [head, ...texts].join(rule) });
    },
  };
}

// The same source gives the same bytes: fixed names, no hashes. CI compares a fresh build with ../static.
export default defineConfig({
  base: "./",
  plugins: [licences()],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    modulePreload: false,
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        assetFileNames: "app[extname]",
        codeSplitting: false,
      },
    },
  },
});

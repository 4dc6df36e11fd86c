/* A VMM that lies about the root image: for tests alone, in place of QEMU.
 *
 * It executes the real QEMU with other arguments, by what it is called:
 *
 *   qemu-honest    the same arguments
 *   qemu-writable  the root image's nodes are not read-only
 *   qemu-lying     what is called root and asked about is an empty, read-only node; the guest's root disk is another node
 *                  over the same descriptor, writable
 *   qemu-device    one device more than was asked for
 *   qemu-append-X  the guest's kernel is given X as well
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *without(const char *arg, const char *word, const char *other) {
    const char *at = strstr(arg, word);
    char *out = malloc(strlen(arg) + strlen(other) + 1);
    if (!at || !out) _exit(1);
    sprintf(out, "%.*s%s%s", (int)(at - arg), arg, other, at + strlen(word));
    return out;
}

int main(int argc, char **argv, char **environment) {
    char *append = strstr(argv[0], "qemu-append-");
    int device = strstr(argv[0], "qemu-device") != NULL;
    int lying = strstr(argv[0], "qemu-lying") != NULL, writable = strstr(argv[0], "qemu-writable") != NULL;
    char **out = calloc(argc + 7, sizeof *out);
    int count = 0;
    if (!out) return 1;
    for (int at = 0; at < argc; at++) {
        char *arg = argv[at];
        int of_root = strstr(arg, "node-name=root") != NULL;
        if (writable && of_root) arg = without(arg, "read-only=on", "read-only=off");
        if (lying && of_root && !strncmp(arg, "driver=file,", 12)) arg = "driver=null-co,node-name=root-file,read-only=on";
        if (lying && !strncmp(arg, "virtio-blk-device,drive=root,", 29)) {
            /* After "-device", which is taken back. */
            count--;
            out[count++] = "-blockdev";
            out[count++] = "driver=file,filename=/dev/fdset/1,node-name=evil-file,locking=off,read-only=off";
            out[count++] = "-blockdev";
            out[count++] = "driver=raw,file=evil-file,node-name=evil,read-only=off";
            out[count++] = "-device";
            arg = "virtio-blk-device,drive=evil,serial=root";
        }
        if (append && at && !strcmp(argv[at - 1], "-append")) {
            char *longer = malloc(strlen(arg) + strlen(append) + 1);
            if (!longer) return 1;
            sprintf(longer, "%s %s", arg, append + strlen("qemu-append-"));
            arg = longer;
        }
        out[count++] = arg;
    }
    if (device) {
        out[count++] = "-device";
        out[count++] = "virtio-balloon-device";
    }
    execve("/usr/bin/qemu-system-x86_64", out, environment);
    execve("/usr/local/bin/qemu-system-x86_64", out, environment);
    return 127;
}

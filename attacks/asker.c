/* Asks the init for a capability with a message of its own making, for tests: `asker EXEC RESOURCE` says that the exec EXEC
 * asks. Prints the kind of the answer's frame, 0a for a reply of the host. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/hotcell/request"};
    unsigned char message[512] = "HC\1\x48", answer[512];
    if (argc != 3 || strlen(argv[2]) > 256) return 2;
    /* Header: magic, version, kind, id, sequence, length; then exec, capability 3 (file-write), length of the resource. */
    uint32_t exec = strtoul(argv[1], NULL, 10), resource = strlen(argv[2]), length = 12 + resource;
    memcpy(message + 12, &length, 4);
    memcpy(message + 16, &exec, 4);
    message[20] = 3;
    memcpy(message + 24, &resource, 4);
    memcpy(message + 28, argv[2], resource);
    int to = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (to < 0 || connect(to, (struct sockaddr *)&address, sizeof address)) return 3;
    if (send(to, message, 16 + length, MSG_NOSIGNAL) < 0) return 4;
    if (recv(to, answer, sizeof answer, 0) < 16) return 5;
    printf("%02x\n", answer[3]);
    return 0;
}

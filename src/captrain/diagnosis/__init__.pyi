from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .foreign_labels import diagnose_labels as diagnose_labels
from .foreign_labels import label_summary as label_summary
from .foreign_labels import publish_label_diagnosis as publish_label_diagnosis
from .foreign_labels import read_labels as read_labels
from .report import diagnosis_summary as diagnosis_summary
from .report import publish_diagnosis as publish_diagnosis
